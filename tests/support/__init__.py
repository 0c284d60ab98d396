"""What tests share: scripted and tiny targets, servers, comparisons."""
