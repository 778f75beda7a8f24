"""Text as people have it: files, archives, tables and dumps become documents."""
