"""The embedded server: a batching engine on the CPU behind the part of SGLang's HTTP API that is used here."""
