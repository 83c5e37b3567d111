"""Who takes part while replicas come and go, and how a new one gets what the others have."""
