"""From records of a job to findings: which link, sender, receiver, host or rank is slow, stuck or out of step."""
