"""Reading a run directory that anybody may have written: inside it alone, regular files alone, in bounded portions."""
