"""Studies: data sets × context layers × seeds, from a file of rules to tables and figures."""
