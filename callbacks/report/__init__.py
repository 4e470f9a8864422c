"""Write report.html, curves.png and the comparison page from the files of run folders."""
