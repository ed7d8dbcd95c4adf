"""What the command line prints: tables and figures for people, JSON documents, notes, progress, and how it ends."""
