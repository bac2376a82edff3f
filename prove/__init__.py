"""A deterministic simulator of the whole service: one process, one seed, no sleeping, real code on real SQLite."""
