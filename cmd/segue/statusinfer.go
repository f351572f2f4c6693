// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
)

// describeInference returns the placement of a service that infers, and how old its estimates are,
// such as "infer territory-learned, estimated 210ms ago". It leaves out infer.among if its value is
// all, or if the placement permits only one value.
func describeInference(s *inspect.ServiceState) string {
	text := string(s.Placement)
	if len(s.Placement.Method().Estimators) > 0 {
		text += " " + s.Inference.Estimator
	}
	if among := s.Inference.Among; among != desired.AmongAll && !s.Placement.Polls() {
		text += " among " + string(among)
	}
	if s.Inference.Age == nil {
		return text + ", not estimated yet"
	}
	age := time.Duration(*s.Inference.Age * float64(time.Second))
	if age < oldEstimates {
		return text + ", estimated " + age.Round(10*time.Millisecond).String() + " ago"
	}
	return text + ", ESTIMATES ARE " + strings.ToUpper(wholeSeconds(*s.Inference.Age)) + " OLD"
}

// oldEstimates is the least age at which estimates are marked as old. It is the longest
// infer.interval, so a running process makes estimates at least this often.
const oldEstimates = 10 * time.Second

// estimateName returns the name of the number that a service infers about each of its servers.
func estimateName(s *inspect.ServiceState) string {
	if desired.Estimator(s.Inference.Estimator).Method().Territories {
		return "capacity"
	}
	return "weight"
}

// describeShare returns the share of a server in the buckets. A service that infers places flows by
// loads instead. For such a service, it returns the server's share of the flows that were placed
// lately, or a dash if this share is unknown.
func describeShare(s *inspect.ServiceState, server *inspect.ServerState) string {
	switch {
	case s.Inference == nil:
		return percent(server.Share)
	case server.PlacedShare == nil:
		return "-"
	}
	return percent(*server.PlacedShare)
}

// describeInferred returns the cells that only services that infer have: the flows of a server, the
// estimate, the expected delay of the next flow, why the server seems slower, and how many flows
// were placed on the server and answered by it.
func describeInferred(i *inspect.InferredServer) []string {
	flows := fmt.Sprintf("%d new, %d established", i.New, i.Established)
	row := []string{flows, describeEstimate(i), short(i.Delay), describeSlower(i.Estimate)}
	return append(row, numbers(uint64(i.Placed), uint64(i.Answered))...)
}

// describeEstimate returns the capacity or the weight of a server, such as "4, waits 0.50, away".
func describeEstimate(i *inspect.InferredServer) string {
	if i.Estimate == nil {
		return "-"
	}
	text := "-"
	if e := i.Estimate; e.Capacity != nil {
		text = short(*e.Capacity)
		if e.Wait != nil && *e.Wait >= 0.005 { // otherwise short shows 0.00
			text += ", waits " + short(*e.Wait)
		}
	} else if e.Weight != nil {
		text = short(*e.Weight)
	}
	if i.Away {
		text += ", away"
	}
	return text
}

// polls tells whether the balancer polls the servers of s for their loads. s must infer.
func polls(s *inspect.ServiceState) bool { return desired.Placement(s.Inference.Estimator).Polls() }

// describePolled returns the load that a server told, and when, such as "7 of 64, 210ms ago".
func describePolled(e *inspect.EstimateState) string {
	if e == nil || e.Polled == nil {
		return "none"
	}
	text := strconv.FormatUint(uint64(e.Polled.Busy), 10)
	if e.Polled.Capacity != nil {
		text += fmt.Sprintf(" of %d", *e.Polled.Capacity)
	}
	age := time.Duration(e.Polled.Age * float64(time.Second))
	return fmt.Sprintf("%s, %s ago", text, age.Round(10*time.Millisecond))
}

// describeSlower returns why a server seems slower, and how much.
func describeSlower(e *inspect.EstimateState) string {
	var reasons []string
	if e != nil {
		for _, r := range []struct {
			factor float64
			why    string
		}{{e.SlowStart, "slow start"}, {e.NoAnswers, "no answers"}, {e.SilentFlows, "silent flows"}} {
			if r.factor > 1 {
				reasons = append(reasons, short(r.factor)+"x, "+r.why)
			}
		}
	}
	if len(reasons) == 0 {
		return "-"
	}
	return strings.Join(reasons, "; ")
}
