"""What `thinwire train --elastic` and `thinwire join` run: replicas that come and go, and their coordinator."""
