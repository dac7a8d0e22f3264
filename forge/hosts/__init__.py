"""Hosts: allocation, placement, network, containers and locks of the processes of a run."""
