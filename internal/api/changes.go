// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
)

// mostBytes is the greatest size of a request. 100,000 servers need about 10 MB.
const mostBytes = config.MostBytes

var errorsOfChange = []int{
	http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
	http.StatusNotFound, http.StatusConflict, http.StatusPreconditionFailed,
	http.StatusServiceUnavailable, http.StatusGatewayTimeout,
}

// changeOperation and applyOperation change the desired state.
var (
	changeOperation = huma.Operation{
		OperationID: "change", Method: http.MethodPost, Path: "/v1/changes",
		Summary: "Add, set, remove and reset services and servers, in one transaction",
		Errors:  errorsOfChange, MaxBodyBytes: mostBytes,
	}
	applyOperation = huma.Operation{
		OperationID: "apply", Method: http.MethodPut, Path: "/v1/services",
		Summary: "Change the services to those of a configuration file, in one transaction",
		Description: "What an override drains stays drained. Other sections of the file have no " +
			"effect. There is a limit for the servers that a service may lose. A server is lost if it is " +
			"removed, is drained or gets the weight 0. If a service would lose more than 30 percent of its " +
			"servers, or its last server in service, the change is refused, unless allow-removals permits " +
			"it. One server may always be lost, unless it is the last. An agent has the same limit for " +
			"its services. With a store, the limit is store.max-removed-percent instead of 30 percent.",
		Errors: errorsOfChange, MaxBodyBytes: mostBytes,
	}
)

// overrider has the overrides of a process: the controller of a balancer or an agent.
type overrider interface {
	Overrides() (list []desired.Override, version string)
}

func registerOverrides(api huma.API, source overrider) {
	huma.Register(api, huma.Operation{
		OperationID: "list-overrides", Method: http.MethodGet, Path: "/v1/overrides",
		Summary: "List overrides, also those of services and servers that do not exist",
	}, func(context.Context, *struct{}) (*body[Overrides], error) {
		list, version := source.Overrides()
		return &body[Overrides]{Overrides{version, overridesOf(list)}}, nil
	})
}

// Terms are the conditions of a change in a request. The type is exported because the library
// cannot set the fields of an unexported embedded type.
type Terms struct {
	Version string `header:"If-Match" minLength:"1" doc:"the version that must be in force; without it, any"`
	DryRun  bool   `query:"dry-run" doc:"tell what would change, and change nothing"`
}

// Resolve refuses "?dry-run" and "If-Match:" without a value. The library would take them for "no
// dry run" and "any version", and the change would be made.
func (*Terms) Resolve(r huma.Context) []error { return refuseEmpty(r, "dry-run") }

func (t *Terms) terms() control.Terms {
	return control.Terms{Version: t.Version, DryRun: t.DryRun}
}

// RemovalTerms are the conditions of a change that has a limit for removals.
type RemovalTerms struct {
	Terms
	PermitsRemovals bool `query:"allow-removals" doc:"permit the change to take more servers out of service than the limit: store.max-removed-percent, or 30 percent without a store"`
}

// Resolve refuses an empty "?allow-removals" as well as what Terms.Resolve refuses.
func (*RemovalTerms) Resolve(r huma.Context) []error {
	return refuseEmpty(r, "dry-run", "allow-removals")
}

func (t *RemovalTerms) terms() control.Terms {
	return control.Terms{Version: t.Version, DryRun: t.DryRun, PermitsRemovals: t.PermitsRemovals}
}

type applyRequest struct {
	RemovalTerms
	RawBody []byte `contentType:"application/yaml"`
}

// refuseEmpty returns an error for each of the switches that the request contains without a value,
// and for an If-Match without a value.
func refuseEmpty(r huma.Context, switches ...string) (problems []error) {
	url := r.URL()
	for _, name := range switches {
		if values, ok := url.Query()[name]; ok && slices.Contains(values, "") {
			problems = append(problems,
				&huma.ErrorDetail{Location: "query." + name, Message: "must be true or false", Value: ""})
		}
	}
	r.EachHeader(func(name, value string) {
		if name == "If-Match" && value == "" {
			problems = append(problems,
				&huma.ErrorDetail{Location: "header.If-Match", Message: "must be a version", Value: ""})
		}
	})
	return problems
}

// changed returns the answer to a request for a change, from the result or the error of the change.
func changed(result *control.Result, err error) (*body[Changed], error) {
	if err != nil {
		return nil, refusal(err)
	}
	answer := Changed{
		Version: result.Version, Changes: []Difference{}, Losses: []Loss{},
		Warnings: textsOf(result.Warnings),
	}
	for _, c := range result.Changes {
		answer.Changes = append(answer.Changes, Difference{c.What, c.Names})
	}
	for _, l := range result.Losses {
		answer.Losses = append(answer.Losses, Loss{l.Service, l.Server, string(l.Cause), l.Flows})
	}
	return &body[Changed]{answer}, nil
}

// effectsOf maps the target of each override, SERVICE or SERVICE/SERVER, to what the override does.
func effectsOf(overrides []desired.Override) map[string]string {
	effects := map[string]string{}
	for _, o := range overrides {
		effects[o.Target()] = o.Does()
	}
	return effects
}
