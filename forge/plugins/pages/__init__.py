"""Pages for people: a report of each run, a comparison of runs."""
