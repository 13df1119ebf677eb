"""From text to indexed data sets and vocabularies."""
