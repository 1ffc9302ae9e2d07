"""Processes that answer `protocol`, and the one client that asks them."""
