"""Candidates timed side by side; what earlier races found."""
