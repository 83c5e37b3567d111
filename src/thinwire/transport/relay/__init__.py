"""Relay: joins TCP connections of hosts that can only dial out; see `server` and `member`."""
