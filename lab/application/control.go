// SPDX-License-Identifier: Apache-2.0

package application

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// State is the present state of a server, with counts since its start.
type State struct {
	Server  string  `json:"server"`
	Workers int     `json:"workers"`
	Busy    int     `json:"busy"` // workers with a connection
	Jobs    int     `json:"jobs"` // requests that have a core or wait for one
	Cores   int     `json:"cores"`
	Speed   float64 `json:"speed"`
	// Colocated is the share of the cores that co-located work takes.
	Colocated   float64 `json:"colocated"`
	Connections uint64  `json:"connections"` // accepted
	Requests    uint64  `json:"requests"`
	// Served is the number of requests whose work has ended. Requests without work do not count.
	Served uint64 `json:"served"`
	// Work is the sum of the work of the served requests, in seconds of a core of speed 1.
	Work float64 `json:"work"`
}

// State returns the state of the server.
func (s *Server) State() State {
	u := s.processors.usage()
	return State{
		Server: s.config.Name, Workers: s.config.Workers, Busy: s.config.Workers - len(s.workers.free),
		Jobs: u.jobs, Cores: s.config.Processors.Cores, Speed: s.config.Processors.Speed,
		Colocated: u.colocated, Connections: s.workers.connections.Load(), Requests: s.requests.Load(),
		Served: u.ended, Work: u.work,
	}
}

// controlHandler answers on the control address, where requests need no worker:
//
//	GET /            the state, as JSON
//	PUT /colocated   replaces the schedule of co-located work by the one in the body
func (s *Server) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(s.State()) // fails only if the client has gone
	})
	mux.HandleFunc("PUT /colocated", func(w http.ResponseWriter, r *http.Request) {
		text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<16))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		schedule, err := ParseSchedule(string(text))
		if err != nil {
			http.Error(w, fmt.Sprintf("colocated %v", err), http.StatusBadRequest)
			return
		}
		if err := s.processors.colocate(schedule); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}
