from .cluster import main

main()
