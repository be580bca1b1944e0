"""Values in binary transfer (typsend) as what their text would have given: value by value (values), by columns (columns)."""
