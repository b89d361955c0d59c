"""Helpers of the rules: paths, flags from the configuration, guards, banner. Nothing heavy is imported
here."""
