"""Token shards, and Forge itself, onto the nodes' own disks."""
