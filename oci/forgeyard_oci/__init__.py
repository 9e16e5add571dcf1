"""Open Container Initiative: images read into root filesystems, plans compiled into bundles."""
