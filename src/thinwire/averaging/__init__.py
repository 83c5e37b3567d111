"""With whom: topologies, and the exchanges that run on them."""
