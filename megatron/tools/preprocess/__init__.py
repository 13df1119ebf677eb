"""Preprocessing: tokenizes text into indexed data sets, and trains vocabularies."""
