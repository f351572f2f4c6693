// SPDX-License-Identifier: Apache-2.0

package testbed

import "time"

// Results is the content of results.json in a directory of results. The runner writes this file
// each time that a run has ended.
type Results struct {
	// Experiment is the name of the experiment, the name of its file without the ending.
	Experiment string `json:"experiment"`
	Title      string `json:"title"`
	// Paper names the paper, the section and the figure that the experiment repeats.
	Paper string `json:"paper"`
	// About says what the experiment does.
	About string `json:"about,omitempty"`
	// Text is the file of the experiment.
	Text string `json:"text"`
	// Trace is the SHA-256 digest of the file of the requests, if the experiment replays a trace.
	Trace string `json:"trace,omitempty"`
	Kind  Kind   `json:"kind"`
	// Axis is the quantity in which the points of the experiment differ.
	Axis  Axis     `json:"axis"`
	Cases []string `json:"cases"`
	// Points are the values on the axis, in ascending order.
	Points []float64 `json:"points"`
	Seeds  int       `json:"seeds"`
	// Claims are statements of the paper about this experiment.
	Claims []Claim `json:"claims,omitempty"`
	Full   bool    `json:"full"`
	Speed  float64 `json:"speed"`
	// Bin is the length of the intervals in which reports show the response times of a replayed
	// day, in seconds (6LB, figure 12). It is 0 if the runs replay no day.
	Bin         float64     `json:"bin,omitempty"`
	Environment Environment `json:"environment"`
	// Runs are the runs that have ended, in the order of cases, points and seeds.
	Runs []Run `json:"runs"`
	// Planned is the number of runs of the whole experiment.
	Planned int `json:"planned"`
}

// Axis is a quantity in which the points of an experiment differ.
type Axis struct {
	// Key is an AxisKind.
	Key string `json:"key"`
	// Label names the quantity and its unit for readers.
	Label string `json:"label"`
}

// Claim is a statement of a paper, or of this project. If it has a quantity, it also has a condition
// by which the results are judged. The left side of the condition is the quantity of the case Of,
// its ratio to the quantity of Over, or its difference from that of Minus. The right side is a statement with a rule of package
// tolerance.
type Claim struct {
	// Text is the statement, in the words of the paper or close to them.
	Text string `json:"text" yaml:"text"`
	// Quantity is a key of responseQuantities or runQuantities.
	Quantity string `json:"quantity,omitempty" yaml:"quantity"`
	// Type selects the requests of a type, such as TypePage. Otherwise the quantity is that of all.
	Type   string  `json:"type,omitempty" yaml:"type"`
	Of     string  `json:"of,omitempty" yaml:"of"`           // a case
	Over   string  `json:"over,omitempty" yaml:"over"`       // a case
	Minus  string  `json:"minus,omitempty" yaml:"minus"`     // a case; excludes Over
	At     float64 `json:"at,omitempty" yaml:"at"`           // a point; all points by default
	OverAt float64 `json:"over_at,omitempty" yaml:"over-at"` // the point of Over, if not At
	// Since is a point. The quantities of both cases are then relative to their own at this point.
	Since float64 `json:"since,omitempty" yaml:"since"`
	// Paper is the paper's statement about the left side, and Ours is one of this project.
	// tolerance.Parse reads both. In Ours, the word simulated in place of a number stands for the
	// left side in the simulator.
	Paper string `json:"paper,omitempty" yaml:"paper"`
	Ours  string `json:"ours,omitempty" yaml:"ours"`
	// Rule is the name of a rule of package tolerance in files. PaperRuns is the number of runs of
	// the paper, or 0 if its number is exact; for the rule monte-carlo.
	Rule      string `json:"rule,omitempty" yaml:"rule"`
	PaperRuns int    `json:"paper_runs,omitempty" yaml:"paper-runs"`
	// PaperRequests is the number of requests in each run of the paper; 0: as many as here.
	PaperRequests uint64 `json:"paper_requests,omitempty" yaml:"paper-requests"`
	// Unjudged says why a claim without a quantity is not judged.
	Unjudged string `json:"unjudged,omitempty" yaml:"unjudged"`
	// Uncounted says why runs that have been made do not have the quantity.
	Uncounted string `json:"uncounted,omitempty" yaml:"-"`

	// Condition is the condition for readers, as in "mean(sc) / mean(sr4) at 0.88: 2.3 ± 0.2
	// (paper; Monte Carlo, 95%)".
	Condition string `json:"holds,omitempty" yaml:"-"`
	// Measured, Simulated and Model are the values of the condition's left side, in the mean of the
	// seeds. Tolerance is the difference from the statement that the rule allows, and Met tells
	// whether the measured value is inside. They are absent while runs are missing. Simulated is
	// also absent for quantities of runQuantities, and for cases that the simulator does not have.
	// Model is also absent for quantities other than the mean, and for cases that the model does
	// not have. Tolerance and Met are absent for the rule monte-carlo if there is only one seed.
	Measured  *float64 `json:"measured,omitempty" yaml:"-"`
	Tolerance *float64 `json:"tolerance,omitempty" yaml:"-"`
	Simulated *float64 `json:"simulated,omitempty" yaml:"-"`
	Model     *float64 `json:"model,omitempty" yaml:"-"`
	Met       *bool    `json:"met,omitempty" yaml:"-"`
}

// Environment describes the machine, the build and the time of an experiment.
type Environment struct {
	Version  string    `json:"version"` // of Segue
	Kernel   string    `json:"kernel"`
	CPU      string    `json:"cpu"`
	Cores    int       `json:"cores"`
	Memory   uint64    `json:"memory"` // bytes
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished,omitzero"`
}

// Run is one run: a case at a point, with a seed. Times are in emulated seconds, except Handshake
// and Machine.LateP99: on a lab that runs at speed 4, a request of 1 s has taken 0.25 s by the
// clock.
type Run struct {
	Case  string  `json:"case"`
	Point float64 `json:"point"`
	Seed  uint64  `json:"seed"`
	// Folder has the files of the run, relative to the directory of results. It is empty unless the
	// experiment is of KindLoad or KindDay. The files are:
	//   - arrivals.tsv, the arrivals and their work, as a trace for segue-lab sim
	//   - requests.csv.gz, a line for each request (time, query, server, outcome, latency, exchange)
	//   - loads.csv, the busy workers of each server over time
	Folder string `json:"folder"`

	// Load is the share of all processors that the requests use, 0 to 1 and more. It is 0 unless
	// the experiment is of KindLoad.
	Load      float64 `json:"load"`
	Servers   int     `json:"servers"`
	Balancers int     `json:"balancers"`
	// Seconds is the time in which requests arrived.
	Seconds  float64           `json:"seconds"`
	Requests uint64            `json:"requests"`
	Failed   uint64            `json:"failed"`
	Failures map[string]uint64 `json:"failures"`

	// Measured are response times. In an experiment of KindForward, they are CPU times of packets.
	// With KindChange and KindHold, they are 0.
	Measured Response `json:"measured"`
	// Types are the response times of each type of request, if there are several (HLB, figure 8).
	Types map[string]Response `json:"types,omitempty"`
	// Simulated are the response times of the simulator for the same arrivals and the same work:
	// the means of several simulations, in which flows have other hashes. It is nil for cases that
	// the simulator does not have.
	Simulated *Response `json:"simulated,omitempty"`
	// Bound are the simulated response times with an omniscient balancer, which knows the requests
	// on all servers, for the same arrivals and the same work. It is nil unless the experiment is
	// of KindLoad.
	Bound *Response `json:"bound,omitempty"`
	// Model is the result of queueing theory for this load, in the long run. It has only the mean.
	// It is nil for cases without a model.
	Model *Response `json:"model,omitempty"`
	// Handshake is the time from a SYN to its SYN-ACK, by the clock and not scaled.
	Handshake *Response `json:"handshake,omitempty"`

	// Fairness is Jain's index of the servers' busy workers, in the mean over time (6LB, section
	// VI-B2). With KindHold, it is the index of their open connections. Busy is the mean number of
	// busy workers of a server.
	Fairness float64 `json:"fairness"`
	Busy     float64 `json:"busy"`
	// Overprovision is the largest number of busy workers of a server, relative to the mean of all
	// servers, in the mean over time (HLB, section VI-A2).
	Overprovision float64 `json:"overprovision,omitempty"`
	// Shares has an element for each server. It is empty with KindChange and KindForward.
	Shares []Share `json:"shares"`
	// Cycles is the number of CPU cycles of a packet. It is nil if the processor does not count them,
	// and unless the experiment is of KindForward.
	Cycles *float64 `json:"cycles,omitempty"`
	// Counters has the numbers of packets that balancers counted during the run, by the reasons of
	// segue status.
	Counters map[string]uint64 `json:"counters"`

	// Observations tells how far balancers that infer differ in what they see. It is nil for other
	// runs, and for those with a single balancer.
	Observations *Observations `json:"observations,omitempty"`
	// CPU is the CPU time of the run, and Memory the memory of the balancers at its end. They are nil
	// unless the experiment measures CPU times.
	CPU     *CPU    `json:"cpu,omitempty"`
	Memory  *Memory `json:"memory,omitempty"`
	Machine Machine `json:"machine"`
	// read has the values of a line of ReadCSV, by column. It is nil for other runs.
	read map[string]float64
	// Warnings tell what may have disturbed the run.
	Warnings []string `json:"warnings,omitempty"`
}

// Response describes a distribution of times, in seconds.
type Response struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	// Large is the share of the requests that the servers with the largest capacity served.
	// LargeOver has this share for each interval of length LargeInterval, by the time at which
	// requests were sent. They are 0 and nil if all servers have the same capacity.
	Large     float64   `json:"large,omitempty"`
	LargeOver []float64 `json:"large_over,omitempty"`
	// Half is half of the 95% confidence interval of the mean; 0 if it is not known.
	Half float64 `json:"half,omitempty"`
	// Distribution is the cumulative distribution, in ascending order.
	Distribution []DistributionPoint `json:"distribution,omitempty"`
}

// DistributionPoint says that a share of all requests, 0 to 1, took at most the time.
type DistributionPoint struct {
	Seconds float64 `json:"seconds"`
	Share   float64 `json:"share"`
}

// Share is what one server did in a run.
type Share struct {
	Server string `json:"server"`
	// Responses is the number of responses. In an experiment of KindHold, it is the number of open
	// connections.
	Responses uint64  `json:"responses"`
	Mean      float64 `json:"mean"` // response time in seconds
	Busy      float64 `json:"busy"` // mean number of busy workers
	// Capacity is the work that the server can do in a second, without co-located work, or the CPUs
	// that it may use. It is 0 if it is not known.
	Capacity float64 `json:"capacity,omitempty"`
	// Estimate is what the balancers infer about the server at the end of the run: its capacity or
	// its weight, in the mean of the balancers. It is 0 if they do not infer.
	Estimate float64 `json:"estimate,omitempty"`
	// Offers by their result; all 0 without hunting.
	Accepted  uint64 `json:"accepted"`
	Refused   uint64 `json:"refused"`
	Returned  uint64 `json:"returned,omitempty"`   // handed back to another candidate
	TakenBack uint64 `json:"taken_back,omitempty"` // handed back to this server
	Forced    uint64 `json:"forced"`
	// FirstThreshold and LastThreshold are the thresholds of the accept policy at the beginning and
	// at the end. They are nil for policies without one.
	FirstThreshold *uint32 `json:"first_threshold,omitempty"`
	LastThreshold  *uint32 `json:"last_threshold,omitempty"`
}

// CPU is the CPU time of a run, in seconds by the clock.
type CPU struct {
	// Balancers and Agents are the times of their processes, and BalancerPrograms and AgentPrograms
	// those of their BPF programs. The latter mostly run in the time of other processes.
	Balancers        float64 `json:"balancers"`
	BalancerPrograms float64 `json:"balancer_programs"`
	Agents           float64 `json:"agents"`
	AgentPrograms    float64 `json:"agent_programs"`
	// All is the time of all processes of the lab, and of the load generator. It includes the
	// packets that the kernel handles in the time of these processes.
	All float64 `json:"all"`
}

// Memory is the memory of all balancers, in bytes.
type Memory struct {
	// Processes is the resident memory of their processes, without pages of files. Kernel is that of
	// their BPF maps and programs.
	Processes uint64 `json:"processes"`
	Kernel    uint64 `json:"kernel"`
}

// Machine tells whether the machine kept up with a run.
type Machine struct {
	// Idle is the share of all cores' time that was left, 0 to 1.
	Idle float64 `json:"idle"`
	// Generator is the CPU time of the load generator as a share of one core.
	Generator float64 `json:"generator"`
	// Repeats is how often the run was repeated because it was disturbed.
	Repeats int `json:"repeats,omitempty"`
	// LateP99 is the 99th percentile of the lateness of requests by the clock, in seconds.
	LateP99 float64 `json:"late_p99"`
}
