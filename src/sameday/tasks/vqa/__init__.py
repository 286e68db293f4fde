"""Visual question answering: answers to questions about images, learned token by token."""
