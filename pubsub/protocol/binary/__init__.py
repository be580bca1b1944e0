"""Values in binary transfer (typsend), converted to the same results as their text: one by one, or by columns."""
