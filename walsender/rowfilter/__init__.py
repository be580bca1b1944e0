"""Row filters of publications: the server's stored expressions, compiled and evaluated on decoded rows."""
