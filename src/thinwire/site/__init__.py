"""Planner inside a site: degrees of parallelism, placement and step time of one replica on several devices.

It imports no torch: a model is a handful of numbers.
"""
