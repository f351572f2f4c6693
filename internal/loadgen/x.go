package loadgen
