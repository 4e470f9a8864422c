"""Write report.html and the comparison page from the files of run folders."""
