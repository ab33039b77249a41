"""kronattn inside other people's frameworks: one thin file for each, none of which is imported by default."""
