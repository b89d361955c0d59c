"""Where a TMDB comes from: a builder program in a checkout, lists of sources, JSON files."""
