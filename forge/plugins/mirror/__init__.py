"""`stage.results: first_node`: a launch on nodes that do not see the directory of its run."""
