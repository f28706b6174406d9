"""Choosing configurations by measurement: what to try, what it costs, what won."""
