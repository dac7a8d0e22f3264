"""Copy token shards, and Forge itself, to the nodes' local disks."""
