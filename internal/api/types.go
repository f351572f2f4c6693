// SPDX-License-Identifier: Apache-2.0

// Package api is the interface by which programs and the commands of segue change a running
// balancer and look at it: HTTP with JSON on a Unix socket. The types here define the document in
// OpenAPI 3.1 that the socket serves at /openapi.json, and against which requests are checked.
package api

import (
	"github.com/segue-lb/segue/internal/desired"
)

// Override has the fields of an override. A field that is missing keeps the value of the file.
type Override struct {
	Drained *bool   `json:"drained,omitempty" doc:"whether the server gets no new connections"`
	Weight  *uint32 `json:"weight,omitempty" maximum:"1000" doc:"the weight of the server; 0: no new connections"`
}

// ServerOverride is the override of a server.
type ServerOverride struct {
	Service string `json:"service"`
	Server  string `json:"server"`
	Override
}

// Overrides are all overrides of a balancer.
type Overrides struct {
	Version   string           `json:"version" doc:"identifies the file and the overrides in force"`
	Overrides []ServerOverride `json:"overrides" nullable:"false"`
}

// Changed is the effect of a change, or the effect that it would have in a dry run.
type Changed struct {
	Version  string       `json:"version" doc:"of the configuration after the change"`
	Changes  []Difference `json:"changes" nullable:"false" doc:"empty: nothing was to be changed"`
	Warnings []string     `json:"warnings" nullable:"false" doc:"about the configuration after the change"`
}

// Difference is one kind of difference, as the log of a reload shows it.
type Difference struct {
	Kind  string   `json:"kind" example:"servers_changed"`
	Items []string `json:"items" nullable:"false" example:"web/s1 (drained false to true)"`
}

// Service is a service of a balancer.
type Service struct {
	Name         string   `json:"name"`
	TakesFlows   bool     `json:"takes_flows" doc:"whether at least one server gets new connections"`
	HasFlowTable bool     `json:"has_flow_table" doc:"whether a table has all flows of the service, so that they can be counted"`
	Servers      []Server `json:"servers" nullable:"false"`
}

// Server is a server of a service, as it is in force.
type Server struct {
	Name      string    `json:"name"`
	Drained   bool      `json:"drained"`
	Weight    uint32    `json:"weight"`
	Condition string    `json:"condition" doc:"as segue status shows it"`
	Override  *Override `json:"override,omitempty" doc:"missing: the server has none that is in force"`
	Flows     *Flows    `json:"flows,omitempty" doc:"missing: the service has no flow table, or no flows were counted yet"`
}

// Flows are the flows of a server that an entry of the flow table names.
type Flows struct {
	Live    uint64  `json:"live" doc:"new, established, silent and half-open"`
	Closing uint64  `json:"closing" doc:"the client or the server has ended them"`
	Age     float64 `json:"age_seconds" doc:"time since the flows were counted"`
}

func overridesOf(list []desired.Override) []ServerOverride {
	all := make([]ServerOverride, len(list))
	for i, o := range list {
		all[i] = ServerOverride{o.Service, o.Server, Override{o.Drained, o.Weight}}
	}
	return all
}
