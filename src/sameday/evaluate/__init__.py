"""Answers to questions: generated, compared with the right ones, and counted."""
