"""Run folders become one HTML file that opens anywhere, offline. Read from files only: no torch here."""
