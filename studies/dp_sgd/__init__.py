"""What De et al. and Kurakin et al. claim of DP-SGD, on nets and data a laptop can train."""
