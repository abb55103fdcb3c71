"""Everything that executes: backends, verification, timing, the race, bundles, the report."""
