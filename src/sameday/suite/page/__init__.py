"""What people see of a suite: the live page and the report."""
