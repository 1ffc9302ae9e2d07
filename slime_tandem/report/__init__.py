"""What a person sees: metric names, tables, the HTML report."""
