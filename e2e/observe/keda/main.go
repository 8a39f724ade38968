// KEDA's own client of external scalers, for test_keda.py.
//
//	keda-scaler ask ADDRESS KEY=VALUE...    what the operator asks at each poll, as a line of JSON
//	keda-scaler watch ADDRESS KEY=VALUE...  a line for each `active` of an `external-push` trigger, until it is ended
//
// The pairs are the metadata of the trigger. A trigger of KEDA has a number, which is 3 here.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr/funcr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/kedacore/keda/v2/pkg/scalers"
	"github.com/kedacore/keda/v2/pkg/scalers/scalersconfig"
)

const askedFor = 10 * time.Second

type answer struct {
	Metric string  `json:"metric"`
	Target float64 `json:"target"`
	Value  float64 `json:"value"`
	Active bool    `json:"active"`
	Error  string  `json:"error"`
}

func main() {
	ctrl.SetLogger(funcr.New(func(_, line string) { fmt.Fprintln(os.Stderr, line) }, funcr.Options{Verbosity: 1}))
	if len(os.Args) < 3 {
		fail(fmt.Errorf("usage: keda-scaler ask|watch ADDRESS KEY=VALUE..."))
	}
	trigger := config(os.Args[2], os.Args[3:])
	switch os.Args[1] {
	case "ask":
		fail(json.NewEncoder(os.Stdout).Encode(ask(trigger)))
	case "watch":
		watch(trigger)
	default:
		fail(fmt.Errorf("unknown command %s", os.Args[1]))
	}
}

// config is the trigger as the operator builds it from a ScaledObject.
func config(address string, pairs []string) *scalersconfig.ScalerConfig {
	metadata := map[string]string{"scalerAddress": address}
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		metadata[key] = value
	}
	return &scalersconfig.ScalerConfig{
		ScalableObjectName:      "llama",
		ScalableObjectNamespace: "prod",
		ScalableObjectType:      "ScaledObject",
		TriggerMetadata:         metadata,
		TriggerIndex:            3,
	}
}

func ask(trigger *scalersconfig.ScalerConfig) answer {
	ctx, cancel := context.WithTimeout(context.Background(), askedFor)
	defer cancel()
	scaler, err := scalers.NewExternalScaler(trigger)
	if err != nil {
		return answer{Error: err.Error()}
	}
	defer scaler.Close(ctx)
	specs := scaler.GetMetricSpecForScaling(ctx)
	if len(specs) != 1 {
		return answer{Error: fmt.Sprintf("%d metric specs", len(specs))}
	}
	name, target := specs[0].External.Metric.Name, specs[0].External.Target.AverageValue
	if target == nil {
		return answer{Error: "the target is no AverageValue"}
	}
	metrics, active, err := scaler.GetMetricsAndActivity(ctx, name)
	if err != nil {
		return answer{Error: err.Error()}
	}
	if len(metrics) != 1 || metrics[0].MetricName != name {
		return answer{Error: fmt.Sprintf("metrics: %v", metrics)}
	}
	return answer{Metric: name, Target: target.AsApproximateFloat64(), Value: metrics[0].Value.AsApproximateFloat64(), Active: active}
}

func watch(trigger *scalersconfig.ScalerConfig) {
	scaler, err := scalers.NewExternalPushScaler(trigger)
	fail(err)
	active := make(chan bool)
	go scaler.Run(context.Background(), active)
	for now := range active {
		fmt.Println(now)
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
