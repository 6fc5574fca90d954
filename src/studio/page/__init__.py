"""A profile as one page that needs nothing from elsewhere: the graph, a table of the nodes, and the timeline."""
