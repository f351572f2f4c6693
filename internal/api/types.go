// SPDX-License-Identifier: Apache-2.0

// Package api is the interface of a running balancer or agent: HTTP with JSON on a Unix socket.
// Programs and the commands of segue observe and change the process by it. The types here define an
// OpenAPI 3.1 document. The socket serves it at /openapi.json, and requests are checked against it.
package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// Instance is the process that has a socket.
type Instance struct {
	Name    string `json:"name" example:"lb" doc:"node.instance of the configuration"`
	Role    string `json:"role" enum:"balancer,agent"`
	Version string `json:"version" doc:"of the build"`
}

// The roles of an instance.
const (
	RoleBalancer = string(datapath.RoleBalancer)
	RoleAgent    = string(datapath.RoleAgent)
)

// Override changes a service or a server of the configuration file.
type Override struct {
	Service string         `json:"service" minLength:"1" maxLength:"63" example:"web"`
	Server  string         `json:"server,omitempty" minLength:"1" maxLength:"63" example:"s1" doc:"missing: the override is about the service itself. Services of agents have no servers"`
	Add     desired.Fields `json:"add,omitempty" doc:"the fields of a service or server that the file does not have"`
	Set     desired.Fields `json:"set,omitempty" doc:"a merge patch (RFC 7396) of the service or server; a service's has no servers"`
	Remove  bool           `json:"remove,omitempty" doc:"the service or server is removed"`
}

// Overrides are all overrides of a process.
type Overrides struct {
	Version   string     `json:"version" doc:"identifies the file and the overrides in force"`
	Overrides []Override `json:"overrides" nullable:"false"`
}

// Edit is one change of a service or server: add, set or remove it, or reset it to the file.
type Edit struct {
	Override
	Reset bool `json:"reset,omitempty" doc:"remove the overrides of the service and its servers, or of the server"`
}

// UnmarshalJSON refuses a field that is null. The library takes null for a missing field: an edit
// whose server is null would be about the whole service.
func (e *Edit) UnmarshalJSON(text []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if string(fields[name]) == "null" {
			return fmt.Errorf("%s of an edit must not be null", name)
		}
	}
	type plain Edit // without this method
	return json.Unmarshal(text, (*plain)(e))
}

// TransformSchema adds to the schema that an edit has exactly one of the four actions. No tag of a
// field can say so.
func (*Edit) TransformSchema(_ huma.Registry, s *huma.Schema) *huma.Schema {
	one := 1
	fields := &huma.Schema{Type: huma.TypeObject, AdditionalProperties: true}
	patch := &huma.Schema{Type: huma.TypeObject, MinProperties: &one, AdditionalProperties: true}
	yes := &huma.Schema{Type: huma.TypeBoolean, Enum: []any{true}} // false would be no action
	for _, action := range []struct {
		name  string
		value *huma.Schema
	}{{"add", fields}, {"set", patch}, {"remove", yes}, {"reset", yes}} {
		hasAction := &huma.Schema{
			Type: huma.TypeObject, Required: []string{action.name},
			Properties: map[string]*huma.Schema{action.name: action.value}, AdditionalProperties: true,
		}
		// The library does this only for schemas that it has made.
		action.value.PrecomputeMessages()
		hasAction.PrecomputeMessages()
		s.OneOf = append(s.OneOf, hasAction)
	}
	return s
}

// Change is a list of edits that are made together or not at all.
type Change struct {
	Edits []Edit `json:"edits" nullable:"false" minItems:"1" maxItems:"100000"`
}

// Changed is the effect of a change, or the effect that it would have in a dry run.
type Changed struct {
	Version  string       `json:"version" doc:"of the configuration after the change; of a dry run: of the configuration that it was made for"`
	Changes  []Difference `json:"changes" nullable:"false" doc:"empty: nothing was to be changed"`
	Losses   []Loss       `json:"losses" nullable:"false" doc:"servers, or services of an agent, whose flows the change affects"`
	Warnings []string     `json:"warnings" nullable:"false" doc:"about the configuration after the change"`
}

// Difference is one kind of difference, as the log of a reload shows it.
type Difference struct {
	Kind  string   `json:"kind" example:"servers_changed"`
	Items []string `json:"items" nullable:"false" example:"web/s1 (drained false to true)"`
}

// Loss is a server, or a service of an agent, whose flows a change affects.
type Loss struct {
	Service string  `json:"service"`
	Server  string  `json:"server,omitempty" doc:"missing: a service of an agent"`
	Cause   string  `json:"cause" enum:"removed,moved,narrowed,forgotten" doc:"removed: the flows lose their server. moved: likewise, because the server gets another address, or its service another VIP, port or protocol. narrowed: the service gets the packets of fewer VIPs or ports, and only flows of the others lose their server. forgotten: the server is in none of the kept generations any more, and only the flows in the flow table of this balancer find it"`
	Flows   *uint64 `json:"flows,omitempty" doc:"live flows of the server when the change was asked for; missing: not known"`
}

// Service is a service of a balancer.
type Service struct {
	Name          string   `json:"name"`
	VIP           string   `json:"vip" doc:"the first, if there are several"`
	VIPs          []string `json:"vips,omitempty" doc:"missing: the service has one VIP"`
	Port          string   `json:"port" doc:"a number or all; the first, if there are several"`
	Ports         []string `json:"ports,omitempty" doc:"missing: the service has one port, or all"`
	Sources       []string `json:"sources,omitempty" doc:"prefixes of the clients that may reach the service; missing: all may"`
	Protocol      string   `json:"protocol"`
	Placement     string   `json:"placement"`
	Persistence   string   `json:"persistence"`
	Encapsulation string   `json:"encapsulation"`
	OnDrain       string   `json:"on_drain" doc:"what becomes of the flows of UDP of a drained server: keep or move-udp"`
	TakesFlows    bool     `json:"takes_flows" doc:"whether at least one server gets new connections"`
	HasFlowTable  bool     `json:"has_flow_table" doc:"whether a table has all flows of the service, so that they can be counted"`
	Override      string   `json:"override,omitempty" doc:"what the override of the service does; missing: it has none"`
	Servers       []Server `json:"servers" nullable:"false"`
}

// Server is a server of a service, as it is in force.
type Server struct {
	Name      string `json:"name"`
	Address   string `json:"address" doc:"the locator, or the far end of the tunnel"`
	Drained   bool   `json:"drained"`
	Weight    uint32 `json:"weight"`
	Condition string `json:"condition" doc:"as segue status shows it"`
	Override  string `json:"override,omitempty" doc:"what the override of the server does; missing: it has none"`
	Flows     *Flows `json:"flows,omitempty" doc:"missing: the service has no flow table, or no flows were counted yet"`
}

// Flows are the numbers of flows in the flow table that name a server.
type Flows struct {
	Live    uint64  `json:"live" doc:"new, established, silent and half-open"`
	Closing uint64  `json:"closing" doc:"the client or the server has ended them"`
	Age     float64 `json:"age_seconds" doc:"time since the flows were counted"`
}

// Reloaded is the answer to a reload.
type Reloaded struct {
	Warnings []string `json:"warnings" nullable:"false"`
}

func overridesOf(list []desired.Override) []Override {
	all := make([]Override, len(list))
	for i, o := range list {
		all[i] = Override{o.Service, o.Server, o.Add, o.Set, o.Remove}
	}
	return all
}

func editsOf(list []Edit) []control.Edit {
	all := make([]control.Edit, len(list))
	for i, e := range list {
		all[i] = control.Edit{
			Service: e.Service, Server: e.Server, Add: e.Add.WithPlainNumbers(), Set: e.Set.WithPlainNumbers(),
			Remove: e.Remove, Reset: e.Reset,
		}
	}
	return all
}
