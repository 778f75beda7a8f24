"""Text in the formats that users have: files, archives, tables and dumps become documents of sentences."""
