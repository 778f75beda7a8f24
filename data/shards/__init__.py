"""HDF5 shards: schema, writer, checked reader, datasets and reports."""
