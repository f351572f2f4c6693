// SPDX-License-Identifier: Apache-2.0

// Package testbed runs the experiments of the papers on real packets. An experiment is a file in
// experiments/. It compares cases, such as placements, at several points, such as loads. Each run
// sends requests through the balancers of a lab to servers with emulated processors, and the
// simulator replays the arrivals of the run.
package testbed
