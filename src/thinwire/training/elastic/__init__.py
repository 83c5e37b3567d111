"""What `thinwire train --elastic` and `thinwire join` run: replicas that come and go, and the coordinator beside them."""
