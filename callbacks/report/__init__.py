"""Write report.html, curves.png and the comparison page from the files in run folders."""
