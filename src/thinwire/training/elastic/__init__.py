"""Everything that `thinwire train --elastic` and `thinwire join` run: replicas and their coordinator."""
