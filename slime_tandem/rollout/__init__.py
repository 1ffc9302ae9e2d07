"""Who writes next, and the loop that lets them write."""
