"""What every program needs: errors, files, logging, locks, provenance."""
